"""The gateway's text side: from text to token ids and back, stop strings, one choice of an answer."""
