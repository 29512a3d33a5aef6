"""The push router: one process that sends both legs of a request and streams decode's answer."""
