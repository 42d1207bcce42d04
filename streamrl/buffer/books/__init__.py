"""Ledger of a run, its log, and the audit that recomputes one from the other."""
