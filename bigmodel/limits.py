"""Numbers that several rooms must agree on, each once, with its reason.

A plan predicts with them what the loader, the dispatcher and the server then do: written twice, they would drift apart
and budgets would not hold. A number that concerns one room alone stays in that room.
"""

from __future__ import annotations

ALIGNMENT = 512
"""Bytes at whose multiples each tensor of a packed buffer starts: what CUDA's allocator and vectorised kernels expect.
Profiles count with it, and dispatch lays blocks out by it."""

FILE_ALIGNMENT = 4096
"""Bytes at whose multiples reads past the page cache begin and end. Checkpoints are written so that they can."""

HOST_ALIGNMENT = 64
"""Bytes at whose multiples torch's allocator has tensors on the host begin. Kernels take other paths, and give other
last bits, for tensors that begin elsewhere."""

DEFAULT_SLOTS = 2
"""Streamed parts that may be on the main device at once, where nothing was said: one runs while the next arrives."""

NEARLY_ALL_EXPERTS = 7 / 8
"""Share of a module's experts from which on a call fetches the next module's ahead: it will want nearly all, too.
Predicted seconds count on what dispatch then does."""

MOST_GROUPS = 512
"""Most slots that one call of an experts function is given; CUDA's grouped product takes fewer than 1024. Predicted
bytes depend on it."""

RESTORE_BUFFERS = 2
"""Quantised parts that are staged on the device at once: while one is restored, the next one arrives."""

READ_AHEAD_BYTES = 64 * 2**20
"""How much of the next part on disk is brought into host memory while one is computed with: one large request, so that
the time between two does not count."""

STAGING_BYTES = 48 * 2**20
"""Host memory through which parts on disk reach an accelerator, at most: six chunks of 8 MiB, two being filled, two
full, two being copied."""

READERS = 2
"""Threads that read from disk at once: one alone leaves the disk idle whenever computing takes its core."""

PLANNED_SHARE = 0.9
"""Share of the free memory that is planned with where no budgets are given; the rest is for other programs, contexts
and fragments."""

PINNED_SHARE = 0.5
"""Share of the host's memory that is pinned at most where nothing was said: more of it would starve all else."""

RESIDENT_SHARE = 0.8
"""Share of the host's free memory that pages of checkpoints may take where no budget is given."""

CACHED_SHARE = 0.7
"""Share of the host's memory up to which the kernel is expected to keep the files of a model from pass to pass."""

KV_SHARE = 0.25
"""Share of a device's free memory that a server takes for keys and values where no plan says how much."""

UNKNOWN_SHARE = 0.2
"""Share of an accelerator's budget that is kept free for activations which nothing is known about: a guess, where 0
would certainly be wrong."""
