"""What kind of work an operator is: one table from the names of profiler events to categories."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase


class Category(enum.Enum):
    """Kinds of work of a training step, in the order of a summary."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    ELEMENTWISE = "element-wise: norms, activations, others"
    COPIES = "copies and index arithmetic"
    DATA = "data loading"
    OTHER = "other operators"
    PYTHON = "Python and unaccounted"


class Strength(enum.IntEnum):
    """How a row of the table competes with the rows of the events around it.

    An event takes the category of the innermost event with the strongest row among itself and those
    that enclose it.
    """

    WEAK = 0
    """Counts where nothing around it has a category: views, allocations."""
    OWN = 1
    """The operator itself, and what it calls that has no category of its own."""
    ALL = 2
    """Everything inside, whatever it is: the products inside attention are attention."""


@dataclass(frozen=True)
class Row:
    """One entry of the table.

    Attributes:
        pattern: shell pattern of event names.
        category: None takes part in nothing.
        strength: against the rows of enclosing events.
        is_operator: time in the event but in no other event inside is work of this category. False for events
            that only mark where Python code or the autograd engine is: that time is Python's.
    """

    pattern: str
    category: Category | None
    strength: Strength = Strength.OWN
    is_operator: bool = True


def _all(category: Category, patterns: str) -> list[Row]:
    return [Row(pattern, category, Strength.ALL) for pattern in patterns.split()]


def _python(category: Category, patterns: str, strength: Strength = Strength.ALL) -> list[Row]:
    """Autograd Functions written in Python, by class name; their backward has ``Backward`` appended."""
    return [Row(pattern, category, strength, is_operator=False) for pattern in patterns.split()]


def _aten(category: Category, names: str, strength: Strength = Strength.OWN) -> list[Row]:
    return [Row(f"aten::{name}", category, strength) for name in names.split()]


TABLE: tuple[Row, ...] = (
    # Marks, not work.
    Row("autograd::engine::*", None, is_operator=False),
    Row("torch::autograd::*", None, is_operator=False),
    Row("steptron::step", None, is_operator=False),
    Row("steptron::forward", None, is_operator=False),
    Row("steptron::gradient reduction", None, is_operator=False),
    Row("steptron::parameter gather", None, is_operator=False),
    # Phases that are a kind of work by themselves, and torch's optimizers.
    Row("steptron::data", Category.DATA, Strength.ALL),
    Row("enumerate(DataLoader)#*", Category.DATA, Strength.ALL),
    Row("steptron::optimizer", Category.OPTIMIZER, Strength.ALL, is_operator=False),
    Row("Optimizer.*#*", Category.OPTIMIZER, Strength.ALL, is_operator=False),
    Row("steptron::garbage collection", Category.PYTHON, Strength.ALL),
    # Communication: issuing a collective, waiting for one, and NCCL's kernels.
    *_all(Category.COMMUNICATION, "steptron::wait c10d::* _c10d_functional::* record_param_comms"),
    *_all(Category.COMMUNICATION, "gloo:* nccl:* nccl*Kernel*"),
    *_all(Category.OPTIMIZER, "aten::_fused_adam* aten::_fused_sgd* aten::_fused_adagrad*"),
    # Our own operations, each whole: the experts' products with the SwiGLU between them, the head's with the softmax,
    # the router's with the selection.
    *_all(Category.ATTENTION, "steptron_kernels::attention*"),
    *_all(Category.PRODUCTS, "steptron_kernels::linear* steptron_kernels::experts* steptron_kernels::route*"),
    *_all(Category.ELEMENTWISE, "steptron_kernels::rms_norm* steptron_kernels::qk_norm_rope*"),
    *_all(Category.ELEMENTWISE, "steptron_kernels::swiglu* steptron_kernels::head_gate* steptron_kernels::add*"),
    *_all(Category.COPIES, "steptron_kernels::combine* steptron_kernels::dispatch* steptron_kernels::row_plan*"),
    *_all(Category.COPIES, "steptron_kernels::pack_weight*"),
    *_all(Category.OPTIMIZER, "steptron_kernels::polar_express*"),
    *_python(Category.ATTENTION, "*Attention *AttentionBackward *FusedAttn* *FlashAttn*"),
    *_python(Category.ELEMENTWISE, "*R[Mm][Ss]Norm *R[Mm][Ss]NormBackward *Rotation *RotationBackward"),
    *_python(Category.PRODUCTS, "GroupedLinear* *LinearCrossEntropy*", Strength.OWN),
    # torch's fused attention.
    *_all(Category.ATTENTION, "aten::*scaled_dot_product* aten::_flash_attention* aten::_efficient_attention*"),
    *_all(Category.ATTENTION, "flex_attention*"),
    # Code that torch.compile generated; products inside are events of their own.
    Row("Torch-Compiled Region*", Category.ELEMENTWISE),
    Row("CompiledFunction*", Category.ELEMENTWISE),
    Row("## Call CompiledFxGraph*", Category.ELEMENTWISE),
    Row("*cpp_fused*", Category.ELEMENTWISE),
    Row("triton_*", Category.ELEMENTWISE),
    # torch's operators; names are without a trailing underscore and `_foreach_`.
    *_aten(
        Category.PRODUCTS,
        "mm addmm bmm baddbmm addbmm matmul linear linear_backward mv addmv einsum tensordot _grouped_mm _scaled_mm "
        "_scaled_grouped_mm _addmm_activation mkldnn_linear* *convolution* conv1d conv2d",
    ),
    Row("mkldnn::*linear*", Category.PRODUCTS),
    *_aten(
        Category.COPIES,
        "copy _to_copy to clone contiguous cat stack *pad* repeat* roll flip tile fill* zero* ones* full* new_zeros "
        "new_ones new_full index* gather* scatter* embedding* _embedding* take* masked_select* masked_scatter nonzero* "
        "sort argsort topk cumsum bincount one_hot arange linspace searchsorted bucketize unique* _unique* histc "
        "cummax _cummax_helper item _local_scalar_dense",
    ),
    Row("Memcpy*", Category.COPIES),
    Row("Memset*", Category.COPIES),
    *_aten(
        Category.ELEMENTWISE,
        "add sub rsub mul div neg reciprocal addcmul addcdiv pow square sqrt rsqrt exp exp2 expm1 log log2 log1p "
        "logsumexp _logsumexp sin cos tanh tanh_backward sigmoid sigmoid_backward silu* gelu* relu* softplus* "
        "*softmax* clamp* minimum maximum abs sign floor ceil round trunc remainder floor_divide fmod lerp where "
        "masked_fill* eq ne lt le gt ge logical_* bitwise_* __and __or __xor isfinite isnan isinf "
        "sum mean prod amax amin max min argmax argmin any all var* std* norm* *norm linalg_vector_norm cumprod "
        "dot vdot *layer_norm* *rms_norm* *dropout* bernoulli* normal* uniform* random* rand* *nll_loss* "
        "cross_entropy* *_cross_entropy* triu tril",
    ),
    *_aten(
        Category.COPIES,
        "empty* new_empty* view* _unsafe_view reshape* ravel _reshape_alias as_strided* t transpose permute expand* "
        "select* "
        "slice* narrow squeeze* unsqueeze* flatten unflatten detach* alias resize* set* resolve_conj resolve_neg "
        "unbind split* chunk unfold movedim diagonal* result_type promote_types scalar_tensor lift_fresh numpy_T "
        "is_nonzero broadcast_tensors broadcast_to type_as requires_grad retain_grad record_stream "
        "_has_compatible_shallow_copy_type",
        Strength.WEAK,
    ),
    Row("detach*", Category.COPIES, Strength.WEAK),
)
"""First match wins. To teach the profiler a new operation, add a row here."""

_UNKNOWN_OPERATOR = Row("*::*", Category.OTHER, Strength.WEAK)
_UNKNOWN_MARK = Row("*", None, is_operator=False)


@functools.cache
def classify(name: str) -> Row:
    """The table's row for an event; an operator (its name has ``::``) without one is `Category.OTHER`,
    and another event without one, such as an autograd Function, only marks where Python is."""
    if name.startswith("aten::"):
        name = name.replace("_foreach_", "", 1).rstrip("_") or name
    for row in TABLE:
        if fnmatchcase(name, row.pattern):
            return row
    return _UNKNOWN_OPERATOR if "::" in name else _UNKNOWN_MARK
