"""What was measured to be fastest: kept, found again, and where it is looked for."""
