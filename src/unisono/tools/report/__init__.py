"""What happened in a run? Its event file, read and drawn."""
