"""The ledger as one page to look at, and two ledgers held against each other."""
