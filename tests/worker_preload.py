"""Imported once by the server process from which the workers of ``tests.worker_pool`` are forked."""

from __future__ import annotations

from steptron.platform import megatron_cpu

megatron_cpu.install()

import megatron.core  # noqa: E402
import megatron.core.pipeline_parallel.schedules  # noqa: E402
import megatron.core.transformer.moe.token_dispatcher  # noqa: E402, F401
