"""Model families whose chats engines render with code instead of a template."""
