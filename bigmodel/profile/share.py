"""What an operation that was recorded on many tokens would ask of a device on some of them."""

from __future__ import annotations

from dataclasses import replace

from .work import ATTENTION, CONVOLUTION, MOVE, POINTWISE, PRODUCT, Work


def for_share_of_tokens(work: Work, share: float) -> Work:
    """Return the work on `share` of the tokens: as many matrices, fewer rows. Keys and values are tokens too."""
    rows, elements, nbytes = (max(1, round(number * share)) for number in (work.rows, work.elements, work.nbytes))
    if work.kind == MOVE:
        return replace(work, nbytes=nbytes)
    if work.kind == ATTENTION:
        return replace(work, rows=rows, elements=elements, nbytes=nbytes)
    return replace(work, rows=rows) if work.kind in (PRODUCT, CONVOLUTION, POINTWISE) else work
