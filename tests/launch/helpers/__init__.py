"""What ranks do in these tests, and what nobody may leave behind."""
