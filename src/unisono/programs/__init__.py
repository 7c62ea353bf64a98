"""What a program's own objects hold, and what may change when: one walk, one account."""
