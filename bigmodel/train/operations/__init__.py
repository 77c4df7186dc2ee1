"""Operations on nested tensors, within a process and across processes."""
