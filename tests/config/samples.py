"""A small complete configuration for tests."""

from __future__ import annotations

from pathlib import Path

MINIMAL = """\
model:
  vocab_size: 512
  hidden_size: 64
  num_layers: 5
  num_dense_layers: 1
  head_dim: 16
  dense_hidden_size: 160
  full: {num_heads: 4, num_kv_groups: 2, rope: {theta: 1e4}}
  sliding: {num_heads: 6, num_kv_groups: 2, window: 16, rope: {theta: 1e4}}
  moe: {num_experts: 8, top_k: 2, expert_hidden_size: 32, shared_hidden_size: 32}
data:
  train:
    - path: runs/a
    - path: runs/b
      weight: 3
  sequence_length: 32
optimizer: {lr: 1e-3}
train:
  output: runs/out
  steps: 10
  global_batch_size: 4
  micro_batch_size: 2
"""


def write(folder: Path, name: str, text: str) -> Path:
    """Writes a file below a folder and returns its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
