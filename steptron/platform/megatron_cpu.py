"""Megatron-Core on machines without CUDA.

Megatron-Core asks for CUDA in many small places: buffers on ``torch.cuda.current_device()``, RNG
states of the GPU, streams, ``torch.compile`` at import. ``install`` replaces names *inside* the
modules of ``megatron.core`` so that these mean the CPU; ``torch`` itself is never touched, so our
own code and every other library see the real one.

``REPLACED`` lists what is replaced and why. Modules loaded before ``install`` are changed in place,
modules imported later as soon as they have been executed. Installing before Megatron's first import
is better: 0.16.1 then imports in about 1 second instead of 3, because TorchInductor is not loaded.

Out of reach of names, and therefore not supported: Megatron's own optimizers, which compare
``Tensor.type()`` with ``torch.cuda.*``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "logspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip


class _Stream:
    """A stream or event on a device that has only one: everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event if event is not None else self

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait = record = synchronize = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Overlay(types.ModuleType):
    """A module with some names replaced; every other name is looked up in the module itself."""

    def __init__(self, module: types.ModuleType, replaced: Mapping[str, Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(replaced)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._module), *self.__dict__})


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``device="cuda"`` of a tensor factory mean the CPU."""

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return build


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | torch.Tensor | None = None,
    input_split_sizes: Sequence[int] | torch.Tensor | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """``torch.distributed.all_to_all_single`` that also takes split sizes as tensors."""

    def as_list(sizes: Sequence[int] | torch.Tensor | None) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    return torch.distributed.all_to_all_single(
        output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op
    )


def _torch_without_cuda() -> _Overlay:
    """``torch`` as Megatron's modules see it."""
    random = _Overlay(
        torch.cuda.random,
        {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state, "manual_seed": _manual_seed},
    )
    cuda = _Overlay(
        torch.cuda,
        {
            "is_available": lambda: False,
            "is_initialized": lambda: False,
            "device_count": _zero,
            "current_device": lambda: _CPU,
            "set_device": _nothing,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "is_current_stream_capturing": lambda: False,
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": _Stream,
            "default_stream": _Stream,
            "stream": lambda _: contextlib.nullcontext(),
            "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
            "random": random,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
            "manual_seed": _manual_seed,
            "memory_allocated": _zero,
            "max_memory_allocated": _zero,
            "memory_reserved": _zero,
            "max_memory_reserved": _zero,
        },
    )
    distributed = _Overlay(torch.distributed, {"all_to_all_single": _all_to_all_single})
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _Overlay(torch, {"cuda": cuda, "distributed": distributed, **factories})


def _tensor_cuda_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``tensor.cuda()`` in the body of a function mean ``tensor.cpu()``."""
    plain: Any = inspect.unwrap(function)
    names = tuple("cpu" if name == "cuda" else name for name in plain.__code__.co_names)
    plain.__code__ = plain.__code__.replace(co_names=names)
    return function


@dataclass(frozen=True)
class Replacement:
    """One replaced name.

    Attributes:
        module: name of a module of ``megatron.core``, or a pattern of ``fnmatch``.
        name: dotted name inside the module.
        why: reason.
        value: new value, computed from the present one (None where the name is missing).
        add: whether the name is set even where the module does not have it.
    """

    module: str
    name: str
    why: str
    value: Callable[[Any], Any]
    add: bool = False


_TORCH = _torch_without_cuda()

REPLACED: tuple[Replacement, ...] = (
    Replacement(
        "megatron.core.*",
        "torch",
        "torch.cuda (device, streams, RNG, memory) and factories with device='cuda' mean the CPU; "
        "all_to_all_single takes split sizes as tensors, which gloo refuses",
        lambda present: _TORCH if present is torch else present,
    ),
    Replacement(
        "megatron.core.jit",
        "jit_fuser",
        "torch.compile at import loads TorchInductor and makes the first step take half a minute",
        lambda _: lambda function: function,
    ),
    Replacement(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        "the RNG state that dropout and initialisation fork is the CPU's",
        lambda _: _get_rng_state,
    ),
    Replacement(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        "the RNG state that dropout and initialisation fork is the CPU's",
        lambda _: _set_rng_state,
    ),
    Replacement(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        "0.16.1 reads the name without Transformer Engine and fails with NameError",
        lambda present: present,
        add=True,
    ),
    Replacement(
        "megatron.core.dist_checkpointing.exchange_utils",
        "exchange_loaded_tensors_gather_rounds",
        "calls tensor.cuda()",
        _tensor_cuda_to_cpu,
    ),
    Replacement(
        "megatron.core.dist_checkpointing.exchange_utils",
        "exchange_loaded_tensors_broadcast",
        "calls tensor.cuda()",
        _tensor_cuda_to_cpu,
    ),
    Replacement(
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
        "calls tensor.cuda()",
        _tensor_cuda_to_cpu,
    ),
)

WITHOUT_TRITON: tuple[tuple[str, str], ...] = (
    (
        "megatron.core.transformer.moe.ops.paged_stash",
        "0.19.2 imports Triton here, unguarded, and this module from megatron.core itself",
    ),
)
"""Modules of GPU kernels, and why each is left empty where Triton is not installed."""

# Without Transformer Engine, Apex and CUDA this is the expected state, not something to act on.
_EXPECTED_WARNINGS = r"(?s).*(Apex|Transformer Engine).*not installed"
_EXPECTED_LOGGERS = ("torch.utils.cpp_extension",)


def install() -> None:
    """Replaces the names of ``REPLACED``, now and in modules imported later. Safe to call again."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        if _is_megatron(name):
            _without_compiled_functions(module)
            _replace(module)


def _is_megatron(name: str) -> bool:
    return name == "megatron.core" or name.startswith("megatron.core.")


def _replace(module: types.ModuleType) -> None:
    for replacement in REPLACED:
        if not fnmatchcase(module.__name__, replacement.module):
            continue
        *path, name = replacement.name.split(".")
        owner: Any = functools.reduce(getattr, path, module)
        if replacement.add or name in vars(owner):
            setattr(owner, name, replacement.value(vars(owner).get(name)))


def _without_compiled_functions(module: types.ModuleType) -> None:
    """Undoes ``jit_fuser`` in a module that was loaded before ``install``."""
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for owner in (module, *classes):
        for name, value in list(vars(owner).items()):
            original = getattr(value, "_torchdynamo_orig_callable", None)
            if original is not None:
                setattr(owner, name, original)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of Megatron-Core as usual and has their names replaced after execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_megatron(fullname):
            return None
        if fullname in dict(WITHOUT_TRITON) and importlib.util.find_spec("triton") is None:
            return importlib.machinery.ModuleSpec(fullname, _WithoutKernels())
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            # On the instance, so that the loader keeps its type and its other abilities.
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


class _WithoutKernels(importlib.abc.Loader):
    """Makes a module of which every name can be imported and none be called."""

    def exec_module(self, module: types.ModuleType) -> None:
        def absent(name: str) -> Callable[..., Any]:
            if name.startswith("__"):
                raise AttributeError(name)

            def kernel(*_: Any, **__: Any) -> None:
                raise RuntimeError(f"{module.__name__}.{name} needs Triton, which is not installed")

            return kernel

        module.__getattr__ = absent  # type: ignore[method-assign]


def _execute(exec_module: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    with _expected_noise_hidden():
        exec_module(module)
    _replace(module)


@contextlib.contextmanager
def _expected_noise_hidden() -> Iterator[None]:
    loggers = [(logger, logger.level) for logger in map(logging.getLogger, _EXPECTED_LOGGERS)]
    for logger, _ in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _EXPECTED_WARNINGS, UserWarning)
            yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)
