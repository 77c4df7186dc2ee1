"""One file per question; peers side by side; results kept as data.

    python -m benchmarks                      lists the questions
    python -m benchmarks decode --rounds 7    answers one (`bigmodel bench decode --rounds 7` is the same)

A question is a module of this package with a docstring (its first line is the question), a function
``add_arguments(parser)`` for options of its own, and a function ``run(options) -> Report``. `command` gives every
question ``--rounds``, ``--seed``, ``--device``, ``--quick``, ``--workdir``, ``--json``, ``--csv`` and the rest.
A question that can be asked on other devices than its own names all of them in ``DEVICES``.
Everything that questions share is in `harness`, their checkpoints in `checkpoints`.
"""
