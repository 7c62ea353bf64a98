"""What a program's objects hold, and which changes are allowed when: one walk, one account."""
