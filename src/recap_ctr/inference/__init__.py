"""An artifact and everything that scores with it."""
