from __future__ import annotations

import re
from pathlib import Path

import pytest

from steptron.profiling.categories import Category, Strength, classify

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::mm", Category.PRODUCTS),
        ("aten::baddbmm_", Category.PRODUCTS),
        ("aten::_grouped_mm", Category.PRODUCTS),
        ("steptron_kernels::linear", Category.PRODUCTS),
        ("steptron_kernels::linear_backward", Category.PRODUCTS),
        ("steptron_kernels::experts_backward", Category.PRODUCTS),
        ("steptron_kernels::linear_cross_entropy", Category.PRODUCTS),
        ("_LinearCrossEntropy", Category.PRODUCTS),
        ("GroupedLinearBackward", Category.PRODUCTS),
        ("steptron_kernels::attention_backward", Category.ATTENTION),
        ("_ChunkedAttention", Category.ATTENTION),
        ("_ChunkedAttentionBackward", Category.ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", Category.ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", Category.ATTENTION),
        ("steptron_kernels::rms_norm", Category.ELEMENTWISE),
        ("steptron_kernels::qk_norm_rope_backward", Category.ELEMENTWISE),
        ("steptron_kernels::swiglu", Category.ELEMENTWISE),
        ("steptron_kernels::head_gate", Category.ELEMENTWISE),
        ("steptron_kernels::add_rms_norm_backward", Category.ELEMENTWISE),
        ("_RmsNorm", Category.ELEMENTWISE),
        ("_ZeroCentredRMSNormBackward", Category.ELEMENTWISE),
        ("aten::_foreach_add_", Category.ELEMENTWISE),
        ("aten::__and__", Category.ELEMENTWISE),
        ("steptron_kernels::combine", Category.COPIES),
        ("steptron_kernels::dispatch_backward", Category.COPIES),
        ("steptron_kernels::row_plan", Category.COPIES),
        ("steptron_kernels::pack_weight", Category.COPIES),
        ("aten::index_select", Category.COPIES),
        ("aten::_foreach_copy_", Category.COPIES),
        ("aten::as_strided", Category.COPIES),
        ("c10d::allreduce_", Category.COMMUNICATION),
        ("gloo:all_reduce", Category.COMMUNICATION),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Category.COMMUNICATION),
        ("Optimizer.step#AdamW.step", Category.OPTIMIZER),
        ("aten::_fused_adamw_", Category.OPTIMIZER),
        ("steptron_kernels::polar_express", Category.OPTIMIZER),
        ("some_library::operation", Category.OTHER),
        ("MulBackward0", None),
        ("autograd::engine::evaluate_function: _ChunkedAttentionBackward", None),
    ],
)
def test_names(name: str, category: Category | None) -> None:
    assert classify(name).category is category


def test_python_functions_are_no_operators_and_native_ones_are() -> None:
    """Time in a Function of Python's in which none of its operators runs is Python's."""
    for name in ("_ChunkedAttention", "_LinearCrossEntropyBackward", "MulBackward0", "steptron::forward"):
        assert not classify(name).is_operator
    for name in ("aten::mm", "steptron_kernels::attention", "steptron::data", "steptron::wait"):
        assert classify(name).is_operator


def test_views_give_way_to_what_encloses_them() -> None:
    assert classify("aten::empty_strided").strength is Strength.WEAK
    assert classify("aten::mm").strength is Strength.OWN
    assert classify("steptron_kernels::attention").strength is Strength.ALL


def test_attention_functions_of_the_model_are_attention() -> None:
    """A renamed attention Function must not fall silently into products and element-wise work."""
    files = [file for folder in ("steptron", "kernels") for file in (REPOSITORY / folder).rglob("*.py")]
    sources = [file.read_text() for file in files if "attention" in str(file.relative_to(REPOSITORY))]
    names = [name for text in sources for name in re.findall(r"class (\w+)\(torch\.autograd\.Function\)", text)]
    assert names
    for name in names:
        assert classify(name).category is Category.ATTENTION, name
        assert classify(f"{name}Backward").category is Category.ATTENTION, name
