"""Runs a model's weights under any layout and records what it computes, to compare implementations."""
