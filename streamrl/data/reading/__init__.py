"""Read data files of any format, row by row."""
