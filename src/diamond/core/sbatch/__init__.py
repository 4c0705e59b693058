"""From existing batch scripts to task files. Pure: text in, text and notes out."""
