"""The bundled demonstration model and the text that it is trained and tried on."""
