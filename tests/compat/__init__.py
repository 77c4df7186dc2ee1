"""Tests of `bigmodel.compat`: standing in for accelerate under other libraries."""
