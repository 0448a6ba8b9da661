"""What the tests of this room share: files, the truth in plain torch operations, child processes."""
