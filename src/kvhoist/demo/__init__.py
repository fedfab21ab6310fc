"""What `kvhoist demo` shows: a small real model, conversations, and the oracles that judge them."""
