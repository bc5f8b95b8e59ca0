"""What the larger commands do, a module each; a command imports what it needs when it runs."""
