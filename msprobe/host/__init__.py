"""The only rooms that know ModelScope and torch's training seams: attaching to a trainer, and detaching without a trace."""
