"""Scores on disk: the same bits again, nothing taken for what it is not, and a folder that stays small and whole."""

import os
import shutil
import threading

import fresh
import numpy as np
import pytest
import scores

import qwenref
from qwenref.compare import identity
from qwenref.compare.faults import find
from qwenref.compare.identity import arithmetic, digest, digest_of, files_of
from qwenref.compare.scoring import lightened, score
from qwenref.compare.store import Store, open_store
from qwenref.errors import InputError, QwenrefWarning
from qwenref.hub import EMBEDDED


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "scores")


@pytest.fixture
def own(tmp_path):
    """A folder of its own with the files of the embedded model."""
    return shutil.copytree(EMBEDDED["tiny"], tmp_path / "own")


def entries(store):
    return sorted(path for path in store.folder.glob("??/*"))


def test_results_of_every_form_come_back_to_the_bit(model, store):
    tasks = scores.forms(model)
    expected = scores.done_here(model, tasks)
    first, again = scores.Counting(), scores.Counting()
    assert scores.same(score(model, tasks, first, store=store), expected) and len(first.given) == len(tasks)
    seen = []
    found = score(model, tasks, again, lambda *at: seen.append(at), Store(store.folder))
    assert scores.same(found, expected) and not again.given and seen == [(len(tasks), len(tasks))]


def test_an_interrupted_run_leaves_what_was_done_and_only_the_rest_is_computed(model, store):
    tasks = scores.many(model, 8)

    def interrupt(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(model, tasks, progress=interrupt, store=store)
    counting, seen = scores.Counting(), []
    counting.arithmetic = digest(arithmetic())
    found = score(model, tasks, counting, lambda *at: seen.append(at), store)
    assert counting.given == tasks[5:] and seen == [(5, 8), (6, 8), (7, 8), (8, 8)]
    assert scores.same(found, scores.done_here(model, tasks))


def test_a_key_is_of_all_that_decides_about_the_result_and_of_nothing_else(model, store):
    vocab = model.config.text_config.vocab_size
    kept = store.of(model)
    chosen, _, whole, given, *_ = scores.forms(model)
    task = given._replace(extra=given.support[:, :2])
    others = [
        chosen,
        chosen._replace(top=19),
        chosen._replace(extra=given.support),
        chosen._replace(extra=given.support, top=0),
        chosen._replace(support=given.support),
        chosen._replace(ids=(1, *chosen.ids[1:])),
        chosen._replace(start=6),
        chosen._replace(how=scores.TRUTH),
        chosen._replace(decode=True),
        given,
        given._replace(support=given.support[:, ::-1]),
        given._replace(support=given.support.reshape(-1, 1)[: len(given.support)]),
        given._replace(how=("jitter", 4, "bfloat16")),
        whole,
    ]
    keys = [kept._key(lightened(each, vocab)) for each in others]
    assert len(set(keys)) == len(keys)
    everything = np.broadcast_to(np.arange(vocab), (len(chosen.ids) - 5, vocab))
    same = [(task, given), (whole, whole._replace(support=everything)), (whole, whole._replace(top=vocab + 1))]
    for one, other in same:
        assert kept._key(lightened(one, vocab)) == kept._key(lightened(other, vocab))
    elsewhere = scores.Counting()
    assert store.of(model, elsewhere)._key(chosen) != kept._key(chosen) == Store(store.folder).of(model)._key(chosen)
    parts = arithmetic()
    assert len({digest({**parts, name: "other"}) for name in parts} | {digest(parts)}) == len(parts) + 1


def test_a_damaged_entry_is_none_and_is_written_again(model, store):
    task = scores.forms(model)[0]
    [scored] = score(model, [task], store=store)
    kept, other = store.of(model), task._replace(how=scores.TRUTH)
    kept.put(other, scored)
    path, foreign = store._path(kept._key(task)), store._path(kept._key(other)).read_bytes()
    whole = path.read_bytes()
    damaged = [b"", whole[:5], whole[:40], whole[:60], whole[:-1], whole + b"\0", foreign]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 97)]
    for content in damaged:
        path.write_bytes(content)
        assert kept.get(task) is None
    store.write(kept._key(task), b"whole, but no arrays")
    assert kept.get(task) is None
    assert scores.same(score(model, [task], store=store), [scored])
    assert path.read_bytes() == whole and scores.same([kept.get(task)], [scored])


def test_what_was_longest_not_used_goes_before_the_limit_is_reached(tmp_path):
    store, content = Store(tmp_path, limit=64_000), os.urandom(1000)
    strangers = [tmp_path / "notes.txt", tmp_path / "ab" / "notes.txt", tmp_path / "ab" / ("0" * 61)]
    fresh_part, old_part = (tmp_path / "ab" / f".{letter * 62}.{'0' * 8}" for letter in "ab")
    strangers[1].parent.mkdir()
    for path in (*strangers, fresh_part, old_part):
        path.write_bytes(bytes(100_000))
    os.utime(old_part, (0, 0))
    keys = [f"{n:02x}" + f"{n:062x}" for n in range(200)]
    for n, key in enumerate(keys):
        store.write(key, content)
        os.utime(store._path(key), (n, n))
        if n >= 20:
            assert store.read(keys[7]) == content  # which makes it the one used last
        found = [path for path in entries(store) if path not in (*strangers, fresh_part, old_part)]
        assert sum(path.stat().st_size for path in found) <= 64_000
    assert all(path.exists() for path in (*strangers, fresh_part)) and not old_part.exists()
    there = [key for key in keys if store.read(key) is not None]
    assert there[0] == keys[7] and there[1:] == keys[-len(there) + 1 :] and 50 < len(there) < 64
    store.write("ff" + "f" * 62, bytes(64_000))
    assert store.read("ff" + "f" * 62) is None and there == [key for key in keys if store.read(key) is not None]


BESIDE = """
import hashlib, random, sys
from qwenref.compare.store import Store
store, random = Store(sys.argv[1], limit=40_000), random.Random(sys.argv[2])
found = 0
for _ in range(600):
    n = random.randrange(60)
    key, content = hashlib.sha256(b"%d" % n).hexdigest(), b"%d" % n * 900
    there = store.read(key)
    assert there in (None, content), n
    found += there is not None
    if there is None or random.random() < 0.2:
        store.write(key, content)
print(found)
"""


def test_two_processes_read_write_and_remove_at_once(tmp_path):
    done = {}

    def run(name):
        done[name] = fresh.python(BESIDE, tmp_path, name, PYTHONWARNINGS="error")

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(int(each.stdout) > 100 and not each.stderr for each in done.values())
    assert sum(path.stat().st_size for path in tmp_path.glob("??/*")) < 40_000 * 18 // 16
    assert not list(tmp_path.glob("??/.*"))


def test_a_folder_that_cannot_be_written_is_one_warning_and_no_more(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    tasks = scores.many(model, 2)
    with pytest.warns(QwenrefWarning, match="scores are not kept") as told:
        found = score(model, tasks, store=Store(tmp_path / "file" / "scores"))
    assert scores.same(found, scores.done_here(model, tasks)) and len(told) == 1


def test_a_disk_that_fills_up_leaves_what_was_there(store, monkeypatch):
    key = "ab" + "0" * 62
    store.write(key, b"before")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(QwenrefWarning, match="No space left"):
        store.write(key, b"after")
    assert store.read(key) == b"before" and len(entries(store)) == 1


def test_a_folder_that_may_only_be_read_is_read(model, store, monkeypatch):
    tasks = scores.many(model, 2)
    found, counting = score(model, tasks, scores.Counting(), store=store), scores.Counting()

    def refuse(*args):
        raise PermissionError("read only")

    monkeypatch.setattr(os, "utime", refuse)
    assert scores.same(score(model, tasks, counting, store=store), found) and not counting.given


def test_the_environment_names_the_folder_or_turns_it_off(monkeypatch, tmp_path):
    monkeypatch.delenv("QWENREF_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_store().folder == tmp_path / "qwenref" / "scores"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store().folder == tmp_path / ".cache" / "qwenref" / "scores"
    monkeypatch.setenv("QWENREF_CACHE", str(tmp_path / "here"))
    assert open_store().folder == tmp_path / "here" / "scores" and open_store(False) is None
    monkeypatch.setenv("QWENREF_CACHE", "0")
    assert open_store() is None and open_store(tmp_path).folder == tmp_path
    assert not list(tmp_path.iterdir())


def changed(model):
    weight = model.get_parameter("model.language_model.norm.weight")
    weight[0] += 1
    return model


def hooked(model):
    model.model.register_forward_hook(lambda *args: None)
    return model


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda folder: qwenref.from_config(qwenref.from_pretrained(folder).config, seed=0), "weights in memory"),
        (lambda folder: find("gate-off").open(qwenref.from_pretrained(folder)), "faults in it: gate-off"),
        (lambda folder: changed(qwenref.from_pretrained(folder)), r"changed weights: .*norm\.weight"),
        (lambda folder: hooked(qwenref.from_pretrained(folder)), "hooks of model"),
    ],
    ids=["memory", "fault", "weights", "hook"],
)
def test_of_a_model_that_is_not_what_its_files_hold_nothing_is_kept(make, why, own, store):
    model, task = make(own), scores.many(qwenref.from_pretrained("tiny"), 1)
    with pytest.raises(InputError, match=why):
        files_of(model)
    assert scores.same(score(model, task, store=store), scores.done_here(model, task)) and not entries(store)


def test_files_that_changed_under_an_open_model_are_not_its_files(own, store):
    model = qwenref.from_pretrained(own)
    before = files_of(model)
    shard = own / model.report.files[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match="have changed since it was opened"):
        files_of(model)
    assert files_of(qwenref.from_pretrained(own)).content != before.content  # one bit, of the same size
    assert before.found() is None
    content[-1] ^= 1
    shard.write_bytes(content)
    assert before.found() == own and files_of(qwenref.from_pretrained(own)).content == before.content


def test_a_copy_elsewhere_is_the_same_files_by_content(own, tmp_path):
    here = files_of(qwenref.from_pretrained("tiny"))
    assert here.within == "tiny" and here._replace(path="/nowhere").found() == EMBEDDED["tiny"]
    assert here._replace(content=None, within=None).found() == EMBEDDED["tiny"]
    there = here._replace(path=str(own), within=None)
    assert there.found() == own and there._replace(content=None).found() is None
    assert there._replace(path="/nowhere").found() is None
    os.remove(own / here.stats[1][0])
    assert there.found() is None


def test_a_snapshot_is_found_in_the_hub_cache_of_another_machine(own, tmp_path, monkeypatch):
    for name in ("one", "other"):
        shutil.copytree(own, tmp_path / name / "models--a--b" / "snapshots" / "c0ffee")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "one"))
    files = files_of(qwenref.from_pretrained(tmp_path / "one" / "models--a--b" / "snapshots" / "c0ffee"))
    shutil.rmtree(tmp_path / "one")
    assert files.found() is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert files.found() == tmp_path / "other" / "models--a--b" / "snapshots" / "c0ffee"


def test_a_file_is_read_once_and_again_when_it_may_be_another(tmp_path, store, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"some")
    first = digest_of(path, store)
    assert not entries(store)  # so young that a later write might leave no trace
    monkeypatch.setattr(identity, "_SETTLED", -1.0)
    assert digest_of(path, store) == first
    [entry] = entries(store)
    store.write(entry.parent.name + entry.name, bytes(32))  # what is remembered is not looked at again
    assert digest_of(path, store) == "00" * 32
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"same")
    os.utime(path, ns=times)  # size and time of writing as before
    assert digest_of(path, store) not in (first, "00" * 32)
