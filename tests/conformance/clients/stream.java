// Reads a stream with what the JDK has: URL, MODEL. Prints the events' JSON as one list.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.stream.Collectors;

public class stream {
    public static void main(String[] arguments) throws Exception {
        String body = """
                {"model": "%s", "stream": true, "temperature": 0, "max_tokens": 8, "messages": [
                    {"role": "user", "content": "Count."},
                    {"role": "assistant", "content": "Count: 1 2 3", "prefix": true}]}""".formatted(arguments[1]);
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/chat/completions"))
                .header("Content-Type", "application/json")
                .POST(BodyPublishers.ofString(body))
                .build();
        System.out.println(HttpClient.newHttpClient().send(request, BodyHandlers.ofLines()).body()
                .filter(line -> line.startsWith("data: ") && !line.equals("data: [DONE]"))
                .map(line -> line.substring("data: ".length()))
                .collect(Collectors.joining(",", "[", "]")));
    }
}
