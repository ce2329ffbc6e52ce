"""What tests ask of rows and tokens."""


def half(tokenizer, id):
    """Whether a token has bytes of no whole character."""
    return "\ufffd" in tokenizer.token_bytes(id).decode("utf-8", "replace")


def same_rows(found, expected):
    assert len(found) == len(expected)
    for row, own in zip(found, expected, strict=True):
        assert row.ids.tolist() == own.ids.tolist() and row.logprobs.tolist() == own.logprobs.tolist()
        assert (row.chosen, row.chosen_logprob) == (own.chosen, own.chosen_logprob)
