"""An actor whose requests go on finding the keys of old weights, for a twin that must notice."""


def freeze_salt(actor):
    """New requests keep the salt of now, whatever is loaded."""
    kind, frozen = type(actor._updates), actor._updates.salt
    kind.salt = property(lambda _: frozen)


def thaw_salt(actor):
    """Undoes :func:`freeze_salt`."""
    del type(actor._updates).salt
