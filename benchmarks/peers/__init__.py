"""Other systems that this library is measured against, behind its own interfaces."""
