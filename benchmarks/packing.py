"""How full best-fit packing makes rows, how alike the lengths in a row are, and how long it takes, against packing in
order of length (best fit decreasing), which fills best. Run from the repository's root:

    python -m benchmarks.packing [DOCUMENTS]

Lengths are drawn from lognormal distributions and cut to a row. "between" is the part of the variance of the logarithm
of the length that lies between rows: 0 where rows are random samples of the documents, 1 where all documents of a row
are equally long.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from steptron.data.packing import Packing, best_fit, pack


def by_length(sizes_D: np.ndarray, capacity: int) -> Packing:
    """Best fit decreasing."""
    order_D = np.argsort(-sizes_D, kind="stable")
    rows_D = np.array(best_fit(sizes_D[order_D].tolist(), capacity))
    return Packing(order_D[np.argsort(rows_D, kind="stable")], np.cumsum(np.bincount(rows_D)))


def between_rows(packing: Packing, sizes_D: np.ndarray) -> float:
    logarithms_D = np.log(sizes_D[packing.documents_D])
    documents_R = np.diff(packing.ends_R, prepend=0)
    means_R = np.add.reduceat(logarithms_D, packing.ends_R - documents_R) / documents_R
    return float(np.repeat(means_R, documents_R).var() / logarithms_D.var())


def main(documents: int) -> None:
    print(f"{documents:,} documents; numpy {np.__version__}, Python {sys.version.split()[0]}")
    for capacity in (8192, 131_072):
        for median, sigma in ((600, 1.0), (2500, 1.2), (8000, 1.3)):
            drawn_D = np.random.default_rng(0).lognormal(np.log(median), sigma, documents)
            sizes_D = np.clip(drawn_D, 1, capacity).astype(np.int32)
            full = int(sizes_D.sum(dtype=np.int64)) / capacity
            begin = time.process_time()
            shuffled = pack(sizes_D, capacity, seed=0)
            seconds = time.process_time() - begin
            sorted_ = by_length(sizes_D, capacity)
            print(
                f"rows of {capacity:>7,}, median {median:>5,}: full {full / shuffled.rows:.3%} (by length "
                f"{full / sorted_.rows:.3%}), between {between_rows(shuffled, sizes_D):.2f} (by length "
                f"{between_rows(sorted_, sizes_D):.2f}), {seconds:.2f} s of CPU time"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 871_000)
