"""A report of a comparison with every field filled, no two values alike, and one of a clean engine."""

import copy

import numpy as np

from qwenref.compare.report import Report

_FLIP = {
    "prompt": "code-2",
    "pos": 41,
    "ref_id": 1101,
    "ref_text": " return",
    "eng_id": 1102,
    "eng_text": "\n",
    "margin": 0.8125,
    "sigma": 0.0625,
    "u": 13.03,
    "class": "non-benign",
}
DIVERGED = {
    "schema": "qwenref.compare/1",
    "created": "2031-01-02T03:04:05Z",
    "tool_version": "7.8.9",
    "status": "DIVERGED",
    "cause": "kernels",
    "confidence": "named",
    "summary": "Removing 'gate: silu in place of sigmoid' from the engine's error brings it back inside.",
    "exit_code": 1,
    "tier": "A",
    "mode": "greedy",
    "reference": {
        "model": "models/tiny",
        "dtype": "bf16-as-stored",
        "semantics": "torch path of transformers",
        "hashes": {"config.json": "c0ffee01", "tokenizer.json": "c0ffee02"},
    },
    "engine": {
        "name": "vllm+http://host:8000",
        "version": "0.99.1",
        "dtype": "bfloat16",
        "quant": "fp8-e4m3",
        "flags": {"mamba_ssm_cache_dtype": "float32x"},
        "tp": 3,
    },
    "suite": {"name": "quick", "sha256": "5eed5eed", "prompts": 4, "positions": 256},
    "envelope": {
        "J": 8,
        "axes": ["split-K", "rope-table"],
        "truth": "fp32",
        "sigma_bar": 0.0471,
        "rms_median": 0.0317,
        "kl_median": 0.00037,
    },
    "decision_path": ["step 7: P path is outside", "step 10: one hypothesis explains the error"],
    "stages": [
        {
            "id": "S1",
            "name": "repeatability",
            "verdict": "green",
            "value": "3 of 3 equal",
            "gate": "all equal",
            "detail": None,
        },
        {
            "id": "S2",
            "name": "tokenizer",
            "verdict": "amber",
            "value": 2,
            "gate": 1,
            "detail": "two strings differ in note",
        },
        {"id": "S5", "name": "prefill", "verdict": "red", "value": 6.71, "gate": 1.5, "detail": "R far above the gate"},
        {"id": "S4", "name": "sampling", "verdict": "skipped", "value": None, "gate": None, "detail": "no output rows"},
    ],
    "stats": {
        "R": {"value": 6.7154, "ci": [5.912, 7.541]},
        "kl": {
            "mean": 0.0173,
            "ci": [0.0151, 0.0199],
            "p50": 0.0092,
            "p99": 0.2113,
            "max": 0.3119,
            "kind": "bucketed",
            "ratio": 46.81,
        },
        "tv": {"mean": 0.0442},
        "js": {"mean": 0.00418},
        "bc": {"mean": 0.9957},
        "sure_agreement": {"n": 251, "agree": 0.9924, "bound95": 0.9881},
        "zmax": {"value": 17.93, "crit": 5.217, "prompt": "code-7", "pos": 58},
        "profile": {"value": 0.7319},
        "period": {"value": 1.414},
        "pd": {"value": 1.0712},
        "rank": {"jaccard5": 0.8888},
        "dp": {"rms": 0.0211},
        "ppl": {"ratio": 1.00317, "se": 0.00049},
        "rl": {"k3": 0.000613},
    },
    "flips": [_FLIP, {**_FLIP, "pos": 47, "ref_text": "a<b", "eng_text": "</b>", "u": 3.21, "class": "benign"}],
    "first_divergence": {**_FLIP, "context_ids": [71, 72, 73], "context_text": "def sum(a, b):\n   "},
    "strips": [
        {
            "prompt": "code-2",
            "start": 40,
            "context_text": "def sum(a, b):\n   ",
            "reference": ["x", " return", " a"],
            "engine": ["x", "\n", " a"],
            "classes": ["", "non-benign", ""],
        }
    ],
    "hypotheses": [
        {
            "id": "gate-silu",
            "class": "kernels",
            "what": "gate: silu in place of sigmoid",
            "beta": 1.013,
            "z": 88.4,
            "r2": 0.9817,
            "rho": 0.9312,
            "D": 6.642,
            "accepted": True,
            "detectable": True,
            "lambda_nats": None,
            "family": "gates",
        },
        {
            "id": "rope-theta",
            "class": "config",
            "what": "rope theta 10,000",
            "beta": 0.207,
            "z": 4.11,
            "r2": 0.0612,
            "rho": 6.5125,
            "D": 12.207,
            "accepted": False,
            "detectable": True,
            "lambda_nats": None,
            "family": None,
        },
        {
            "id": "l2-eps",
            "class": "kernels",
            "what": "l2norm eps 1e-5",
            "beta": 0.019,
            "z": 0.317,
            "r2": 0.00017,
            "rho": 6.7153,
            "D": 0.0313,
            "accepted": False,
            "detectable": False,
            "lambda_nats": 11.75,
            "family": None,
        },
    ],
    "runner_up": "rope-theta",
    "detection_limit": "faults with an effect below 0.5 of a rounding variant",
    "localisation": {
        "first_bad": {"layer": 3, "site": "layers.3.self_attn.gate", "pos": 9, "ratio": 41.77},
        "sites": [
            {"site": "layers.2.resid_post", "layer": 2, "ratio": 1.117, "bad_share": 0.0021},
            {"site": "layers.3.self_attn.gate", "layer": 3, "ratio": 41.76, "bad_share": 0.9713},
        ],
        "gate": 3.0,
        "splice": [{"layer": 4, "to_truth": 6.6991, "to_engine": 0.0213}],
        "conclusion": "The fault is before layer 4.",
        "matrix_file": "layers.npz",
    },
    "per_position_file": "run.positions.npz",
    "findings": [
        {
            "code": "config_mismatch",
            "severity": "warning",
            "message": "state dtype reads back as bfloat16",
            "evidence": {"state_dtype": "bf16!"},
        }
    ],
    "blind_spots": ["fp8 keys and values on prompts this short"],
    "config_diff": [
        {"key": "rms_norm_eps", "ref": 1e-06, "engine": 1.1e-05},
        {"key": "chat.default_system", "ref": "You are\n", "engine": "You are \t"},
    ],
    "text_diffs": [
        {
            "what": "chat_template",
            "id": "turn-2",
            "ref": "<|im_start|>user\nHi<|im_end|>\n",
            "engine": "<|im_start|>user\nHi <|im_end|>\n\n",
            "note": "trailing newline doubled",
        }
    ],
    "arbiter": None,
    "repro": {
        "argv": ["qwenref", "compare", "models/tiny", "--engine", "vllm+http://host:8000", "--jitter", "8"],
        "env": {"QWENREF_NUM_THREADS": "2"},
    },
}


def document(**changes):
    """The document of an engine outside, every field filled."""
    return copy.deepcopy({**DIVERGED, **changes})


def clean(**changes):
    """The document of an engine inside, with nothing that was found."""
    return document(
        **{
            "status": "AGREE_WITHIN_NOISE",
            "cause": "none",
            "confidence": None,
            "exit_code": 0,
            "summary": "Nothing is outside.",
            "flips": [],
            "first_divergence": None,
            "hypotheses": [],
            "runner_up": None,
            "localisation": None,
            "findings": [],
            "stages": [],
            "config_diff": [],
            "text_diffs": [],
            "stats": {"R": {"value": 1.07, "ci": [1.01, 1.12]}},
            **changes,
        }
    )


def arrays(n=256, prompts=4, sites=2, seed=0):
    """Arrays under every name."""
    draw = np.random.default_rng(seed)
    kl = draw.gamma(1.0, 1e-4, n)
    u = np.where(draw.random(n) < 0.05, draw.gamma(2.0, 2.0, n), 0.0)
    return {
        "prompt": np.repeat(np.arange(prompts), n // prompts),
        "pos": np.tile(np.arange(n // prompts), prompts) + 12,
        "margin": draw.gamma(1.5, 2.0, n),
        "sigma": draw.gamma(9.0, 0.005, n),
        "u": u,
        "flip": np.digitize(u, [1e-9, 4.0, 5.2]).astype(np.int8) + (u > 0),
        "kl": kl,
        "kl_jitter_min": kl * 0.3,
        "kl_jitter_max": kl * 1.8,
        "R_prompt": np.array([6.1, 6.9, 0.9, 1.7]),
        "R_prompt_low": np.array([5.0, 6.0, 0.8, 1.1]),
        "R_prompt_high": np.array([7.0, 7.5, 1.2, 2.2]),
        "error_mod64": draw.gamma(9, 0.1, 64),
        "error_mod128": draw.gamma(9, 0.1, 128),
        "qq": np.sort(draw.standard_normal(n)),
        "pit": draw.random(n),
        "layer_error": draw.lognormal(0, 1, (sites, n)),
    }


def report(**changes):
    return Report(document(**changes), arrays())
