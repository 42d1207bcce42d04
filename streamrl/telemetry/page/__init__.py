"""A run as a page of charts: one self-contained HTML file, or served while the run goes on."""
