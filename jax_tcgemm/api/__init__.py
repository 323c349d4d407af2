"""What a user calls."""
