"""Weights as arrays: Tensor adds the methods people chain without thinking, Parameter marks what a module registers."""

import ml_dtypes
import numpy as np

from qwenref.exchange import as_array, bfloat16_capsule

# What every parameter without data points at; being bytes it cannot be written.
_NOTHING = bytes(32)


class Tensor(np.ndarray):
    """An ndarray with torch's everyday accessors.  `size` and `data` stay NumPy's; nothing here is ever a copy unless
    the dtype changes or `clone` is called."""

    __slots__ = ()

    grad = None

    def __array_finalize__(self, source):
        # Slices, reshapes and results of a Parameter hold its numbers but are not the weight, so that assigning one to
        # a module registers nothing.
        if isinstance(source, Parameter) and type(self) is Parameter:
            self.__class__ = Tensor

    @property
    def requires_grad(self):
        return False

    @requires_grad.setter
    def requires_grad(self, wanted):
        self.requires_grad_(wanted)

    def requires_grad_(self, wanted=True):
        if wanted:
            raise NotImplementedError("requires_grad: inference only, there are no gradients here")
        return self

    @property
    def device(self):
        return "meta" if self.is_meta else "cpu"

    @property
    def is_meta(self):
        """True if there are a shape and a dtype but no data."""
        base = self.base
        while isinstance(base, np.ndarray):
            base = base.base
        return base is _NOTHING

    def numel(self):
        return self.size

    def dim(self):
        return self.ndim

    def element_size(self):
        return self.itemsize

    def detach(self):
        """The same memory, not a Parameter."""
        return self.view(np.ndarray).view(Tensor)

    def numpy(self):
        """The same memory as a plain ndarray."""
        return self.view(np.ndarray)

    def cpu(self):
        return self

    def contiguous(self):
        return self if self.flags.c_contiguous else np.ascontiguousarray(self).view(Tensor)

    def clone(self):
        return self.detach().copy()

    def float(self):
        return self._as(np.float32)

    def double(self):
        return self._as(np.float64)

    def half(self):
        return self._as(np.float16)

    def bfloat16(self):
        return self._as(ml_dtypes.bfloat16)

    def __dlpack__(self, **options):
        """The same memory for another library, as in `torch.from_dlpack(weight)`.  bfloat16 is no type of NumPy's own:
        `np.from_dlpack` refuses it, `np.asarray` is the array."""
        if self.is_meta:
            raise BufferError("a parameter without data has nothing to export")
        return bfloat16_capsule(self, **options) if self.dtype == ml_dtypes.bfloat16 else super().__dlpack__(**options)

    def _as(self, dtype):
        return self if self.dtype == dtype else self.detach().astype(dtype)

    def __repr__(self):
        if self.is_meta:
            return f"{type(self).__name__}(meta, shape={self.shape}, dtype={self.dtype})"
        return super().__repr__()

    def __str__(self):
        return repr(self) if self.is_meta else super().__str__()


class Parameter(Tensor):
    """A weight: the array is not copied, and a module registers it under the name it is assigned to.

    Tied weights are one object.  `weight[...] = values` changes the numbers in place; what is derived from a
    Parameter (slice, reshape, sum) is a Tensor.  Copies and pickles of one are Parameters with their own memory, except
    that the view of a checkpoint is pickled as its place in the files and what was changed.
    """

    __slots__ = ()

    def __new__(cls, data, requires_grad=False):
        return as_array(data).view(np.ndarray).view(cls).requires_grad_(requires_grad)

    @classmethod
    def meta(cls, shape, dtype):
        """Shape and dtype without memory: every element is one read-only zero; `nbytes` is what the data would take."""
        shape = tuple(shape)
        return np.ndarray(shape, dtype, _NOTHING, strides=(0,) * len(shape)).view(cls)

    def __copy__(self):
        return self.__deepcopy__({})

    def __deepcopy__(self, memo):
        if self.is_meta:
            return Parameter.meta(self.shape, self.dtype)
        return Parameter(np.array(self, subok=False))

    def __reduce__(self):
        from qwenref.weights import reduced

        if self.is_meta:
            return Parameter.meta, (self.shape, self.dtype)
        return reduced(self) or super().__reduce__()
