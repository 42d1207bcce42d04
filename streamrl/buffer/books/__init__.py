"""Ledger of a run, run log, and the audit that recomputes the ledger from the log."""
