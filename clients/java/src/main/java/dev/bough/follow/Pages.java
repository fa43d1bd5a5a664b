package dev.bough.follow;

import java.util.Iterator;
import java.util.function.Function;

/** The pages of the responses of any call. */
record Pages<R, E>(Iterator<R> responses, Function<R, Page<E>> page) implements Iterator<Page<E>> {
  @Override
  public boolean hasNext() {
    return responses.hasNext();
  }

  @Override
  public Page<E> next() {
    return page.apply(responses.next());
  }
}
