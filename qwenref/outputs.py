"""What a forward returns: values by attribute, by key, or by position, as in transformers."""


class ModelOutput:
    """Named values in a fixed order; one that was not asked for is None as an attribute and absent otherwise.

    `out.logits`, `out["logits"]` and `out[0]` are the same; `past_key_values` is the older name of `cache`.
    """

    def __init__(self, **values):
        self.__dict__.update(values)

    def keys(self):
        return tuple(name for name, value in self.__dict__.items() if value is not None)

    def values(self):
        return tuple(value for value in self.__dict__.values() if value is not None)

    def items(self):
        return tuple(zip(self.keys(), self.values(), strict=True))

    to_tuple = values

    def __iter__(self):
        return iter(self.keys())

    def __len__(self):
        return len(self.keys())

    def __contains__(self, name):
        return ("cache" if name == "past_key_values" else name) in self.keys()

    def __getitem__(self, key):
        if not isinstance(key, str):
            return self.values()[key]
        value = self.__dict__.get("cache" if key == "past_key_values" else key)
        if value is None:
            raise KeyError(f"{key!r} is not among {', '.join(self.keys())}")
        return value

    @property
    def past_key_values(self):
        return self.cache

    def __repr__(self):
        def shown(value):
            if hasattr(value, "shape"):
                return f"{value.dtype} {list(value.shape)}"
            return f"{len(value)} arrays" if isinstance(value, tuple) else repr(value).split("\n")[0]

        return "\n".join([type(self).__name__, *(f"  {name:<18} {shown(value)}" for name, value in self.items())])
