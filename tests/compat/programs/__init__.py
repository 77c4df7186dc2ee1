"""Programs that tests run in an interpreter of their own: standing in for accelerate lasts as long as the process.

Each answers questions by printing ``[question, answer]`` as JSON, one a line.
"""
