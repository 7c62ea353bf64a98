"""Who is there: workers, who started them, and where they meet."""
