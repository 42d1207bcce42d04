"""Read and write files: atomic writes, bounded reads, settings, model directories."""
