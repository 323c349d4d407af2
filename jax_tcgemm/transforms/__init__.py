"""What a user applies to a whole function."""
