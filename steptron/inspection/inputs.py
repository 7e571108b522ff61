"""Token ids from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steptron.errors import UserError

_EXPECTED = "expected whole numbers [batch, seq], as numpy.save writes an int64 array"


def read_ids(path: Path) -> NDArray[np.int64]:
    """Token ids [B, S] from an .npy file.

    Raises:
        UserError: there is no such file, it is no .npy file, or it holds something else.
    """
    if not path.is_file():
        raise UserError(f"--input-ids {path}: there is no such file")
    try:
        with path.open("rb") as stream:
            ids = np.lib.format.read_array(stream, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"--input-ids {path} cannot be read as an .npy file ({error}): {_EXPECTED}") from error
    found = f"--input-ids {path} holds {ids.dtype} {list(ids.shape)}"
    if ids.dtype.kind not in "iu" or ids.ndim != 2:
        raise UserError(f"{found}: {_EXPECTED}")
    if ids.size == 0:
        raise UserError(f"{found}: it needs at least one sequence of at least one token")
    if int(ids.max()) > np.iinfo(np.int64).max:
        raise UserError(f"{found} with the number {int(ids.max())}, which is no int64: {_EXPECTED}")
    return ids.astype(np.int64)


def check_vocabulary(ids_BS: NDArray[np.int64], vocab_size: int) -> None:
    """Refuses ids that the model has no embedding for.

    Raises:
        UserError: names the first such id, and says how many there are.
    """
    outside = np.argwhere((ids_BS < 0) | (ids_BS >= vocab_size))
    if outside.size:
        row, place = outside[0].tolist()
        raise UserError(
            f"--input-ids: {len(outside)} of {ids_BS.size} ids are outside the vocabulary, which has 0 to "
            f"{vocab_size - 1}: the first is {ids_BS[row, place]} in row {row} at place {place}"
        )
