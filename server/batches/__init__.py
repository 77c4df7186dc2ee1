"""OpenAI's files and batches: kept in a folder, and answered beside what clients wait for."""
