import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.time.Duration;
/**
* Prefix continuation
 * */
public class ChatCompletionsClient {
    public static void main(String[] args) {
        // API URL
        String url = "https://api-ap-southeast-1.modelarts-maas.com/v2/chat/completions";
        // Replace it with the actual API key.
        String apiKey = "MAAS_API_KEY";
        // Replace it with a model that supports prefix continuation.
        String modelName = "deepseek-v3.2"; 
        String jsonBody = String.format(
                """
                        {
                            "model": "%s",
                            "messages": [
                                {"role": "user", "content": "Implement quick sort for an array using Python. Do not add any additional content."},
                                {"role": "assistant", "content": "def quick_sort(array)", "prefix" : true}
                            ],
                            "temperature": 0.6,
                            "stream": false
                        }""", modelName);
        try {
            HttpClient client = HttpClient.newBuilder()
                    .connectTimeout(Duration.ofSeconds(10))
                    .build();
            // Construct an HTTP request.
            HttpRequest request = HttpRequest.newBuilder()
                    .uri(URI.create(url))
                    .header("Content-Type", "application/json")
                    .header("Authorization", "Bearer " + apiKey)
                    .POST(HttpRequest.BodyPublishers.ofString(jsonBody))
                    .build();
    // Send the request and obtain a response.
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            int statusCode = response.statusCode();
            String responseBody = response.body();
            // Write the response to a file.
            String fileContent = "Status Code: " + statusCode + "\nResponse Content:\n" + responseBody;
            Files.writeString(Paths.get("response.txt"), fileContent);
            // Console output
            System.out.println(statusCode);
            System.out.println(responseBody);
        } catch (IOException | InterruptedException e) {
            e.printStackTrace();
        }
    }
}
