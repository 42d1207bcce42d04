"""File access: atomic writes, bounded reads, typed settings, model directories, user code."""
