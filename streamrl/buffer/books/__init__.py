"""The ledger of a run, its log, and the audit of both."""
