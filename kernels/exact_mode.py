"""A torch-function mode under which a model's own code is exact, or says which of its functions is not.

Each torch function is one of three kinds. *Free*: it moves data, or IEEE 754 rounds its result correctly, element by
element, so that an element's place in a batch or a vector cannot matter. *Mapped*: its place is taken by a function of
this package that has a fixed tree. Everything else raises `UnsupportedOpError`. This package's own ops leave the mode.

Enter the mode inside of a module's `forward`: hooks, FSDP's and checkpointing's among them, then run outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from . import functions, ops


class UnsupportedOpError(NotImplementedError):
    """A torch function that decides bits and that samebits has no exact form for."""


@dataclass(frozen=True)
class Routing:
    """How a router chooses: by the `topk` of [T, num_experts] with k = top_k.

    choose: is shown the router's own choice, ids int64 [T, k], each row ascending, and returns None to leave it, or
    other ids to use, int64 [T, k] in any order, each expert at most once per row. They are then sorted, and values are
    gathered by them, so that gradients reach the scores.

    The router's product, the `linear` with num_experts outputs, stays in fp32: rounded logits would tie.
    """

    num_experts: int
    top_k: int
    choose: Callable[[Tensor], Tensor | None] | None = None


def _named(names: str, *owners: Any) -> set[Any]:
    """Return the functions of these names, each of all owners that have it."""
    found = {name: {getattr(o, name) for o in owners if hasattr(o, name)} for name in names.split()}
    assert all(found.values()), found
    return set().union(*found.values())


_METADATA = "shape dtype device ndim requires_grad is_cuda is_meta layout grad_fn is_leaf itemsize nbytes"
_FREE: set[Any] = {
    # what a tensor is: no arithmetic
    *(getattr(Tensor, name).__get__ for name in _METADATA.split()),
    *_named(
        "size dim numel stride storage_offset data_ptr element_size is_contiguous is_floating_point is_complex __len__"
        " __repr__ __format__ requires_grad_",
        Tensor,
        torch,
    ),
    torch._C._set_grad_enabled,
    *_named("_enter_autocast _exit_autocast", torch.amp.autocast_mode),
    # views, copies, reads and writes of elements: each output is some input, or a constant
    *(getattr(Tensor, name).__get__ for name in ("data", "T", "mT")),
    *_named(
        "view view_as reshape reshape_as flatten unflatten transpose t permute movedim squeeze unsqueeze expand"
        " expand_as broadcast_to select narrow split chunk unbind cat concat stack repeat repeat_interleave tile roll"
        " flip clone contiguous detach copy_ fill_ zero_ gather scatter scatter_ index_select take_along_dim where"
        " masked_fill masked_fill_ tril triu item tolist numpy cpu cuda empty zeros ones full empty_like zeros_like"
        " ones_like full_like new_empty new_zeros new_ones new_full new_tensor tensor as_tensor __getitem__"
        " __setitem__ __iter__ broadcast_tensors",
        Tensor,
        torch,
    ),
    F.one_hot,
    # casts: one rounding to nearest even, or none
    *_named("to type type_as float double half bfloat16 int long bool", Tensor),
    # one correctly rounded operation per element
    *_named(
        "add add_ sub sub_ rsub subtract mul mul_ multiply div div_ divide true_divide neg negative abs sqrt reciprocal"
        " square outer __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__"
        " __rtruediv__ __itruediv__ __rdiv__ __idiv__ __neg__ __abs__",
        Tensor,
        torch,
    ),
    # comparisons, choices of an element, whole numbers: nothing is rounded
    *_named(
        "eq ne lt le gt ge equal isnan isinf isfinite maximum minimum max min amax amin argmax argmin clamp clamp_"
        " clamp_min clamp_max clip relu relu_ sign floor ceil trunc any all logical_and logical_or logical_not"
        " logical_xor bitwise_and bitwise_or bitwise_not __and__ __or__ __xor__ __invert__ __eq__ __ne__ __lt__ __le__"
        " __gt__ __ge__ __bool__",
        Tensor,
        torch,
    ),
    F.relu,
}
_SUMS = _named("add add_ sub sub_ rsub subtract", Tensor, torch)  # of three positional arguments, one is alpha
_FREE_ONLY_WITH = {  # other values make of it more than one rounding, or a sum in any order
    "alpha": 1,
    "reduce": None,
    "rounding_mode": None,
}


def _refusal(what: str) -> UnsupportedOpError:
    return UnsupportedOpError(f"torch function {what} has no exact form")


def _last(x: Tensor, dim: Any, name: str) -> None:
    dims = dim if isinstance(dim, tuple | list) else [dim]
    if [d if d is None or d >= 0 else d + x.dim() for d in dims] != [x.dim() - 1]:
        raise _refusal(f"{name} over dimension {dim} of {list(x.shape)}, which is not the last,")


def _check_dtype(name: str, *dtypes: torch.dtype | None) -> None:
    for dtype in dtypes:
        if dtype is not None and dtype not in ops.DTYPES:
            raise _refusal(f"{name} of {dtype}")


def _unary(name: str) -> Callable[..., Tensor]:
    def exact(x: Tensor, inplace: bool = False) -> Tensor:
        _check_dtype(name, x.dtype)
        if inplace:
            raise _refusal(f"{name} in place")
        return functions.unary(x, name)

    return exact


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return _unary("gelu_pytorch_tanh" if approximate == "tanh" else "gelu")(x)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if (beta, threshold) != (1, 20):
        raise _refusal(f"softplus with beta {beta} and threshold {threshold}")
    return _unary("softplus")(x)


def _softmax(x: Tensor, dim: int | None = None, *rest: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    _last(x, dim, "softmax")
    dtype = next((each for each in rest if isinstance(each, torch.dtype)), dtype)  # F.softmax has it fourth
    _check_dtype("softmax", x.dtype, dtype)
    return functions.softmax(x, dtype or x.dtype)


def _reduction(name: str) -> Callable[..., Tensor]:
    def exact(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        if not x.is_floating_point():  # whole numbers: any order
            return getattr(x, name)(dim, keepdim, dtype=dtype)
        _last(x, dim, name)
        _check_dtype(name, x.dtype, dtype)
        out = functions.row_sums(x, x.shape[-1] if name == "mean" else 1, dtype or x.dtype)
        return out[..., None] if keepdim else out

    return exact


def _rsqrt(x: Tensor) -> Tensor:
    _check_dtype("rsqrt", x.dtype)
    return (1.0 / torch.sqrt(x.float())).to(x.dtype)


def _pow(x: Tensor, exponent: Any) -> Tensor:
    if isinstance(exponent, int | float) and exponent in (2, -0.5):
        return x * x if exponent == 2 else _rsqrt(x)
    raise _refusal(f"pow with exponent {exponent}")


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != 1:
        raise _refusal(f"matmul of {list(x.shape)} and {list(y.shape)}, which is more than an outer product,")
    return x * y


def _arange(*args: Any, **kwargs: Any) -> Tensor:
    if not all(isinstance(value, int) for value in (*args, *(kwargs.get(n, 0) for n in ("start", "end", "step")))):
        raise _refusal("arange of fractions")
    return torch.arange(*args, **kwargs)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and p:
        raise _refusal("dropout in training")
    return x


def _embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: Any = None, *rest: Any, **named: Any
) -> Tensor:
    if max_norm is not None:
        raise _refusal("embedding with max_norm")
    return F.embedding(ids, weight, padding_idx, None, *rest, **named)


def _linear(routing: Routing | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_dtype("linear", x.dtype, weight.dtype)
    routes = routing is not None and weight.shape[0] == routing.num_experts
    return ops.linear(x, weight, bias, torch.float32 if routes else None)


def _topk(routing: Routing | None, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    _last(x, dim, "topk")
    _check_dtype("topk", x.dtype)
    if not largest:
        raise _refusal("topk of the smallest")
    found = functions.top_k(x, k)
    if routing is None or x.dim() != 2 or (x.shape[1], k) != (routing.num_experts, routing.top_k):
        return torch.return_types.topk(found)
    ids = found.indices.sort(-1).values
    others = None if routing.choose is None else routing.choose(ids)
    if others is not None:
        ids = others.sort(-1).values
    return torch.return_types.topk((x.gather(-1, ids), ids))


def _mapped(pairs: Iterable[tuple[str, Callable[..., Any]]]) -> dict[Any, Any]:
    return {f: exact for names, exact in pairs for f in _named(names, Tensor, torch, F)}


_MAPPED: dict[Any, Any] = {F.dropout: _dropout, F.embedding: _embedding} | _mapped(
    [
        *((name, _unary(name)) for name in ("sigmoid", "silu", "tanh", "exp", "log", "cos", "sin")),
        ("gelu", _gelu),
        ("softplus", _softplus),
        ("softmax", _softmax),
        ("sum", _reduction("sum")),
        ("mean", _reduction("mean")),
        ("rsqrt", _rsqrt),
        ("pow __pow__", _pow),
        ("matmul __matmul__", _matmul),
        ("arange", _arange),
    ]
)
_ROUTED: dict[Any, Any] = _mapped([("linear", _linear), ("topk", _topk)])


class ExactMode(TorchFunctionMode):
    """Run torch functions in their exact form, and refuse those that have none; see the module's docstring."""

    def __init__(self, routing: Routing | None = None) -> None:
        """Make a mode; routing: for a router's forward, which of its calls decides the experts."""
        super().__init__()
        self.routing = routing

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Call `func` or its exact form. Raises UnsupportedOpError, with its name, where it has none."""
        kwargs = dict(kwargs or {})
        unusual = [name for name, usual in _FREE_ONLY_WITH.items() if kwargs.get(name, usual) != usual]
        if func in _SUMS and len(args) + ("other" in kwargs) > 2:
            unusual.append("alpha")
        if func in _FREE and not unusual:
            return func(*args, **kwargs)
        if "input" in kwargs:  # torch's name of the first argument
            args = kwargs.pop("input"), *args
        with torch._C.DisableTorchFunction():
            if func in _ROUTED:
                return _ROUTED[func](self.routing, *args, **kwargs)
            if func in _MAPPED:
                return _MAPPED[func](*args, **kwargs)
            name = resolve_name(func) or getattr(func, "__name__", repr(func))
            raise _refusal(" ".join((name, *(f"with {each}" for each in unusual))))
