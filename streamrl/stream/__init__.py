"""One module per part of the stream that the loops of pipeline.py are made of."""
