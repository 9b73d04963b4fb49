"""An actor that goes wrong in its bookkeeping of versions, for twins that must notice."""


def freeze_salt(actor):
    """New requests keep the salt of now, whatever is loaded."""
    kind, frozen = type(actor._updates), actor._updates.salt
    kind.right_salt, kind.salt = kind.salt, property(lambda _: frozen)


def thaw_salt(actor):
    """Undoes :func:`freeze_salt`."""
    kind = type(actor._updates)
    kind.salt = kind.right_salt
    del kind.right_salt


def count_wrongly(actor):
    """Spans are counted one token late, as if an output had been overlooked."""
    kind = type(actor._gate)
    right = kind.switch

    def switch(gate, *args):
        right(gate, *args)
        for request in gate.running.values():
            if request.sample is not None:
                last, position = request.sample._starts[-1]
                request.sample._starts[-1] = (last, position + 1)

    kind.right_switch, kind.switch = right, switch


def restore_counting(actor):
    """Undoes :func:`count_wrongly`."""
    kind = type(actor._gate)
    kind.switch = kind.right_switch
    del kind.right_switch
