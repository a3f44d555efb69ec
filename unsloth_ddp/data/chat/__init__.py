"""Messages to text: the parts of a row, their places in the rendered chat, and the assistant's spans."""
