package dev.bough.follow;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * What a status says beside its code and its message.
 *
 * @param reason the name of a bough.v1.ErrorReason, without its prefix; empty if the error is not the server's
 * @param metadata what the reason is about, such as {@code run_id}
 * @param violations the fields of the request that are wrong
 * @param retrySeconds the least delay before the call is worth repeating; 0 for none
 */
public record ErrorDetails(
    String reason, Map<String, String> metadata, List<BadRequest.FieldViolation> violations, double retrySeconds) {

  /** Returns the details of an error. */
  public static ErrorDetails of(StatusRuntimeException error) {
    var status = StatusProto.fromThrowable(error);
    List<Any> all = status == null ? List.of() : status.getDetailsList();
    var info = first(all, ErrorInfo.class).orElse(ErrorInfo.getDefaultInstance());
    var request = first(all, BadRequest.class).orElse(BadRequest.getDefaultInstance());
    var delay = first(all, RetryInfo.class).orElse(RetryInfo.getDefaultInstance()).getRetryDelay();
    return new ErrorDetails(
        info.getReason(),
        info.getMetadataMap(),
        request.getFieldViolationsList(),
        delay.getSeconds() + delay.getNanos() / 1e9);
  }

  private static <M extends Message> Optional<M> first(List<Any> details, Class<M> type) {
    for (var each : details) {
      if (each.is(type)) {
        try {
          return Optional.of(each.unpack(type));
        } catch (InvalidProtocolBufferException error) {
          return Optional.empty();
        }
      }
    }
    return Optional.empty();
  }
}
